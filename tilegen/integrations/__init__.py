"""What other packages ask of attention. Each module here imports its package when it is imported
itself: `import tilegen` imports none."""
