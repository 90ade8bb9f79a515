"""Support for models of other libraries. The rest of the package does not import this, and imports of other libraries
happen at use."""
