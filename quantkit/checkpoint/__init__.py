"""Model folders: reading, writing, and the origin of their models."""
