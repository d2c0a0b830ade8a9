//! What the benchmarks of the project report: samples condensed to numbers, rows and records, tables, curves.
//!
//! A benchmark runs what it compares several times, in turn, so that a change of the machine's mood hits all of it;
//! only ratios within one such session mean anything.

mod columns;
mod counts;
mod curves;
mod figures;
#[cfg(feature = "plot")]
pub mod plot;
mod records;
mod rivals;
mod row;
mod stats;

pub use columns::{Columns, ratios, table_of};
pub use counts::Counts;
pub use curves::{Curve, Panel, Point, panels, points_of};
pub use figures::{Figures, FiguresRecord, condense_figures, table_of_figures};
pub use records::{Peer, Record, Sample, condense, table};
pub use rivals::{Rivalry, side_by_side};
pub use row::{Round, Rounds, Row, rows_from_csv, rows_to_csv};
pub use stats::{Summary, median, percentile};
