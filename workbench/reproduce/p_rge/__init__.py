"""P-RGE: every table and figure whose numbers can be simulated from sizes, or executed small."""
