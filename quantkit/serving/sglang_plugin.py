"""The entry point of SGLang's plug-in: `register`, which SGLang calls once in each of its
processes.

SGLang keeps its methods in a table, and asks them in their order whether a folder is theirs. It has
no function that registers one. No kernel is compiled, and CuPy is not imported.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("sglang.quantkit")


def register() -> None:
    """Put quantkit's method before SGLang's own methods. A warning tells if this SGLang cannot take
    it.
    """
    try:
        from sglang.srt.arg_groups.choices import add_quantization_method_choices
        from sglang.srt.layers.quantization import QUANTIZATION_METHODS

        from quantkit.serving.engine_config import METHOD
        from quantkit.serving.sglang_quantization import QuantkitConfig
    except (ImportError, AttributeError) as error:
        logger.warning("quantkit's plug-in does not fit this SGLang and serves nothing (%s)", error)
        return
    if METHOD not in QUANTIZATION_METHODS:
        others = dict(QUANTIZATION_METHODS)
        QUANTIZATION_METHODS.clear()
        QUANTIZATION_METHODS.update({METHOD: QuantkitConfig, **others})
        add_quantization_method_choices([METHOD])
