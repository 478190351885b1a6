"""The front end: `backend` for torch.compile, `export` for plait.compile. Both end in `Captured` graphs."""
