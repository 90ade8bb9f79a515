"""Names of attributes and layers of models that the checks of plans recognise."""

from __future__ import annotations

import re

#: Attributes of an attention module or its config with the number of query heads.
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
#: Attributes with the number of key and value heads.
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "num_query_groups")
#: Attributes with the number of features of a head.
HEAD_SIZE = ("head_dim", "head_size", "attention_head_size")
#: Names of projections to keys or to values.
KEY_OR_VALUE = re.compile(r"(w?[kv]|key|value)(_?(proj|linear|layer|a|b))?$", re.IGNORECASE)
#: Names of norms of queries or keys.
QUERY_OR_KEY_NORM = re.compile(r"(q|k|query|key)_?(norm|ln|layer_?norm|rms_?norm)$", re.IGNORECASE)
#: Names of projections to queries, keys and values together.
OF_ATTENTION = re.compile(r"(c_attn|q_?k_?v|query_?key_?value|in_?proj)", re.IGNORECASE)
#: Names of projections with a packed weight, which stacks several matrices.
FUSED = re.compile(
    r"(c_attn|(to_)?w?q?_?k_?v|query_?key_?value|in_?proj|gate_?up|up_?gate|w_?1_?[23])(_?(proj|linear|layer))?$",
    re.IGNORECASE,
)
