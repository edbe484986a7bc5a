"""The record of a model: its blocks, calls, draws and costs, found without computing it whole."""
