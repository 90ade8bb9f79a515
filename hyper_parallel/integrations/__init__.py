"""Models of other libraries. Nothing here is imported by the rest of the package, and no library before it is used."""
