"""The MindSpore backend. `base.MindSporePlatform` is the entry; `grad` holds the gradient functions for users."""
