"""P-RGE: fine-tuning with forward passes only; its queries are distributed over devices that exchange seeds and
scalars.
"""
