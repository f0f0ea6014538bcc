"""P-RGE: fine-tuning with forward passes only, its queries spread over devices that exchange seeds and scalars."""
