"""The former place of `origin.resolve`, for scripts that import it from here."""

from quantkit.checkpoint.origin import resolve as resolve
