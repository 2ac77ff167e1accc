"""What has another form in DeepSpeed than here: small objects that translate one into the other."""
