"""Styles: what a plan gives one module, as data and as forwards that come of it."""
