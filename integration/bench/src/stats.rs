//! Many measurements as a few numbers.

use serde::{Deserialize, Serialize};

/// Times of one kind, condensed. All zero where nothing was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// How many.
    pub count: u64,
    /// Their mean.
    pub avg: f64,
    /// The smallest.
    pub min: f64,
    /// Half of them are no larger.
    pub p50: f64,
    /// 99 of 100 are no larger.
    pub p99: f64,
    /// 999 of 1000 are no larger.
    pub p999: f64,
    /// The largest.
    pub max: f64,
}

impl Summary {
    /// Condenses values in any order.
    pub fn of(mut values: Vec<f64>) -> Summary {
        values.sort_unstable_by(f64::total_cmp);
        let (Some(min), Some(max)) = (values.first(), values.last()) else { return Summary::default() };
        Summary {
            count: values.len() as u64,
            avg: values.iter().sum::<f64>() / values.len() as f64,
            min: *min,
            p50: percentile(&values, 50.0),
            p99: percentile(&values, 99.0),
            p999: percentile(&values, 99.9),
            max: *max,
        }
    }
}

/// The smallest of the sorted values that at least `percent` of them do not exceed (nearest rank): always a value that
/// was measured. Zero without any.
pub fn percentile(sorted: &[f64], percent: f64) -> f64 {
    // Rounding must not lift 99.9 % of 1000 above 999.
    let rank = (percent * sorted.len() as f64 / 100.0 - 1e-9).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or_default()
}

/// The middle value; of an even number the mean of both middle ones. Zero without any.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match (values.len() % 2, values.get(half)) {
        (_, None) => 0.0,
        (1, Some(middle)) => *middle,
        (_, Some(upper)) => (values[half - 1] + upper) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_the_mean_of_both_middles() {
        assert_eq!(median([]), 0.0);
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn a_percentile_is_the_measured_value_of_its_rank() {
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&hundred, 50.0), 50.0);
        assert_eq!(percentile(&hundred, 99.0), 99.0);
        assert_eq!(percentile(&hundred, 99.9), 100.0);
        let thousand: Vec<f64> = (1..=1000).map(f64::from).collect();
        assert_eq!(percentile(&thousand, 99.0), 990.0);
        assert_eq!(percentile(&thousand, 99.9), 999.0);
        assert_eq!(percentile(&[7.0], 50.0), 7.0);
        assert_eq!(percentile(&[7.0, 9.0], 50.0), 7.0);
        assert_eq!(percentile(&[7.0, 9.0], 0.0), 7.0);
        assert_eq!(percentile(&[], 99.0), 0.0);
    }

    #[test]
    fn a_summary_does_not_care_for_the_order() {
        let summary = Summary::of((1..=200).rev().map(f64::from).collect());
        assert_eq!((summary.count, summary.min, summary.max), (200, 1.0, 200.0));
        assert_eq!((summary.avg, summary.p50, summary.p99, summary.p999), (100.5, 100.0, 198.0, 200.0));
        assert_eq!(Summary::of(Vec::new()), Summary::default());
    }
}
