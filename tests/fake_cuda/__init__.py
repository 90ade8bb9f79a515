"""torch-cuda without a GPU: its decisions with torch.cuda replaced, and the library on fake tensors of device cuda."""
