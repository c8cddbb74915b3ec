"""The models: norms as sites, attention, MLP, the list of layers, and their initialisation."""
