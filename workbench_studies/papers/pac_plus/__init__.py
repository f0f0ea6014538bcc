"""PAC+: every table and figure that can be simulated from sizes or executed at small size."""
