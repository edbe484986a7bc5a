"""Small, plain models to learn and measure with; any other nn.Module trains just as well."""
