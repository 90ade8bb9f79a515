"""The place of every element of a distributed tensor: which part a rank holds, and in which order in memory."""
