"""Following plain code between styled modules: what each plain tensor stands for, judged by the rules."""
