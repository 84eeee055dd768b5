"""What only shows across ranks: matched collectives, clocks, stragglers, slow links, pipeline bubbles."""
