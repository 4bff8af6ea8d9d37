"""The jobs: plan, calibrate, quantize, prune, convert, publish."""
