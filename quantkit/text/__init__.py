"""Text: where it comes from, how conversations become text, and the token sequences that calibrate
and evaluate.
"""
