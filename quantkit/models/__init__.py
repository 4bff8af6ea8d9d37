"""Models as transformers builds them: on the meta device, one block at a time; calibration data."""
