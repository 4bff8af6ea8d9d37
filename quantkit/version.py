"""The version of quantkit, which reports and packed folders record."""

__version__ = "0.1.0"
