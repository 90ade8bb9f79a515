"""Styles: each declares the placements of one module in a plan, and builds the module's forward from them."""
