"""Programs of styles: conversions, forwards and what they compare between ranks; nothing here knows a style."""
