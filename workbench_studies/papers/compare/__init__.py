"""All methods next to each other: same devices, model, data and budget."""
