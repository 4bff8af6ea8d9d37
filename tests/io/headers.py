"""Strategies that draw headers of safetensors files."""

from __future__ import annotations

from hypothesis import strategies as st

from quantkit.io.safetensors_files import DTYPES

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES, "F4"]) | JSON,
        "shape": st.lists(st.integers(-1, 9), max_size=9) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=1, max_size=3) | JSON,
    },
)
