-- The number of sales in half an hour of the evening.
select count(*) as sales
from store_sales
join household_demographics on hd_demo_sk = ss_hdemo_sk
join time_dim on t_time_sk = ss_sold_time_sk
join store on s_store_sk = ss_store_sk
where t_hour = 20 and t_minute >= 30 and hd_dep_count = 7 and s_store_name = 'ese'
order by sales
limit 100
