"""The MindSpore backend. `base.MindSporePlatform` is the entry; `gradients.grad` has the gradient functions for
users."""
