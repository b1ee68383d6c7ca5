"""`andon tail`: a training log becomes posts, with no change to the trainer."""
