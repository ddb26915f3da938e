"""Components of a calibrated transform back to rows of the pool: predict, synthesise, RoPE, cast and scatter."""
