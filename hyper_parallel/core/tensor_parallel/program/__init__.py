"""Programs of styles: conversions, forwards and comparisons between ranks; nothing here knows a style."""
