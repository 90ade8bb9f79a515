"""Names that models give their attributes and layers, which the checks of plans know."""

from __future__ import annotations

import re

#: Attributes of an attention module, or of its config: how many heads it has.
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
#: How many heads of keys and values.
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "num_query_groups")
#: Features of a head.
HEAD_SIZE = ("head_dim", "head_size", "attention_head_size")
#: Projections to keys or to values.
KEY_OR_VALUE = re.compile(r"(w?[kv]|key|value)(_?(proj|linear|layer|a|b))?$", re.IGNORECASE)
#: Norms of queries or keys.
QUERY_OR_KEY_NORM = re.compile(r"(q|k|query|key)_?(norm|ln|layer_?norm|rms_?norm)$", re.IGNORECASE)
#: Projections to queries, keys and values together.
OF_ATTENTION = re.compile(r"(c_attn|q_?k_?v|query_?key_?value|in_?proj)", re.IGNORECASE)
#: Projections whose weight is several matrices in one.
FUSED = re.compile(
    r"(c_attn|(to_)?w?q?_?k_?v|query_?key_?value|in_?proj|gate_?up|up_?gate|w_?1_?[23])(_?(proj|linear|layer))?$",
    re.IGNORECASE,
)
