"""Where every element of a distributed tensor lies: which part a rank holds, and in which order in memory."""
