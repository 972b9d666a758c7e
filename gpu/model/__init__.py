"""Models: shape, weights, files and the forward pass."""
