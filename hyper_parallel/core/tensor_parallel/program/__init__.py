"""Building blocks of styles: conversions, forwards and comparisons between ranks. No module here depends on a style."""
