"""The former place of `text.tokenizer`, for scripts that import it from here."""

from quantkit.text.tokenizer import load_tokenizer as load_tokenizer
