"""The second forward of a plan, of which MindSpore makes graphs from their source."""
