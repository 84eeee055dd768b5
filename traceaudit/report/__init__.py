"""Reports: terminal, HTML, figures and JSON, each a function of the result (the parsed ``result.json``) alone.

``words`` names things, ``formats`` writes numbers, ``rows`` turns the result into rows; the rest draws those rows.
"""
