"""Programs as users of MindSpore write them, each run on one device and in parallel: see `program.Program`."""
