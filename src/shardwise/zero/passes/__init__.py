"""Passes: when units are gathered, released and reduced."""
