"""The former place of `text.sequences`, for scripts that import it from here."""

from quantkit.text.sequences import draw_calibration as draw_calibration
