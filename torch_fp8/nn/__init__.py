"""FP8 layers, and the autograd functions and state behind them."""
