"""The entry point of vLLM's plug-in: `register`, which vLLM calls in each of its processes, perhaps
several times.

It registers one quantization method and changes nothing else. No kernel is compiled, and CuPy is
not imported.
"""

from __future__ import annotations

import logging
import re
from importlib.metadata import version

#: The first release of vLLM that was tested, and the last.
TESTED = ((0, 26), (0, 33))

logger = logging.getLogger("vllm.quantkit")  # vLLM shows the lines of its own loggers only


def register() -> None:
    """Register quantkit's method with vLLM; one warning says so if this vLLM was not tested, or
    cannot take it.
    """
    if (line := untested(version("vllm"))) is not None:
        logger.warning(line)
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from quantkit.serving.engine_config import METHOD
        from quantkit.serving.vllm_quantization import QuantkitConfig
    except (ImportError, AttributeError) as error:
        logger.warning("quantkit's plug-in does not fit this vLLM and serves nothing (%s)", error)
        return
    register_quantization_config(METHOD)(QuantkitConfig)


def untested(release: str) -> str | None:
    """Say that a release of vLLM is outside the tested range, None if it is inside."""
    found = re.match(r"(\d+)\.(\d+)", release)
    first, last = TESTED
    if found is not None and first <= (int(found[1]), int(found[2])) <= last:
        return None
    tested = " to ".join(".".join(map(str, end)) for end in TESTED)
    return (
        f"quantkit's plug-in was tested with vLLM {tested}, this is {release}: compare the outputs "
        "before you trust it"
    )
