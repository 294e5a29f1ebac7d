"""What engines are fed with: data sets."""
