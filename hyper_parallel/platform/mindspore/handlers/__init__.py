"""What MindSpore wants from a distributed tensor besides the operations of the op table."""
