"""One result against another: what changed, by how much, and whether that is more than noise."""
