"""Linear-attention models that cannot be cut, and why: mostly, their stock config has no field for the key width."""

ONE_HEAD_DIM = "its config has one {field} for keys, values and {also}, so no stock config has a smaller key dim"
REFUSED = {
    "bailing_hybrid": ONE_HEAD_DIM.format(field="linear_head_dim", also="the softmax layers"),
    "minimax": ONE_HEAD_DIM.format(field="head_dim", also="the softmax layers"),
    "rwkv7": "its key width is the hidden size, so no stock config has a smaller key dim",
    "gdn2": "flash-linear-attention has the layer but no model class that would load a checkpoint",
}
