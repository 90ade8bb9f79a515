"""Styles: they say as data, and as forwards made from that, how a plan treats one module."""
