"""P-RGE: every table and figure that can be computed from sizes or executed at small size."""
