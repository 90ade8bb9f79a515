"""The second forward of a plan: cells that MindSpore compiles into graphs from their source."""
