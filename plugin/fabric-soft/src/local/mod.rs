//! Software fabric between two processes of one host.
